"""HTTP: the tuple store for programs in any language, metrics and health, on Starlette and uvicorn."""
