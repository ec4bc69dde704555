"""`deepinfer up`: the roles of a server as actors of a Ray cluster."""
