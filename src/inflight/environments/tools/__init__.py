"""Tools for models: parsing calls, answering them, and running code in a sandbox."""
