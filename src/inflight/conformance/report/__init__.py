"""Renderings of a certificate: in a terminal, as a JSON, JUnit XML or HTML file, and as a badge."""
