"""What a certificate looks like: in a terminal, as a file of JSON, JUnit XML or HTML, and as a badge."""
