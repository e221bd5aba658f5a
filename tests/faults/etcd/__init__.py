"""What etcd does to Keyloft, and Keyloft to etcd, when nodes fail."""
