"""The way of a record that is put: checked, queued, summed, written."""
