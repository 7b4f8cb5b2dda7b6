"""The live page: one HTML page with its style and small ES modules, served by the hub; nothing is built or fetched."""
