"""What was found, as text, JSON and one HTML page. No torch."""
