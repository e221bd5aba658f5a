"""What a store must withstand: killed processes, power cuts, full disks, broken files, rivals and impatient callers."""
