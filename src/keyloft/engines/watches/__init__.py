"""Watches: `feed` follows the change log, `interest` finds whom a key concerns, `watch` reports to users."""
