"""What keeps a directory small and sound: collection, tenants, repair, migration."""
