"""HTTP: tuples, plugins and workflows for programs in any language, metrics, health and the admin page."""
