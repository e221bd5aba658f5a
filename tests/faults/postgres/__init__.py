"""What a store on PostgreSQL must withstand: a lost server or network, a pooler, refusals and traps of the server."""
