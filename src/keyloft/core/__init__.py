"""What all packages share: keys, values, records, and the protocols that engines implement."""
