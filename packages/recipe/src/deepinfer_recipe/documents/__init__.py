"""Documents of requests as text of the prompt."""
