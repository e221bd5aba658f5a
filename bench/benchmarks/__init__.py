"""One module per benchmark, named as `scripts/bench` names it; each has `prepared`."""
