"""The tuple store without `await`: what `keyloft.open_sync` returns."""
