"""Training programs as users write them; each has `main(zoo)` and faults at the places where people make them.

Names of modules are those of the user's own model, without the `module.` of a wrapper.
"""
