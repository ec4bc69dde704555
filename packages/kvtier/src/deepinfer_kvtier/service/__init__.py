"""Directory service: which store or machine holds a record, as hints only."""
