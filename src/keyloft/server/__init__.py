"""Puts a service together: the only room that names both a concrete engine and the faces that it serves."""
