"""The admin page: what a service stores and does, for people in a browser; values are hidden until asked for."""
