"""The tuple store: what `keyloft.open` returns."""
