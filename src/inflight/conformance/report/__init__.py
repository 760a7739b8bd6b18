"""Renderings of a certificate: on a terminal, as a JSON, JUnit XML or HTML file, and as a badge."""
