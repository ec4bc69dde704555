"""What a conversation is, whatever protocol it came by and whatever model it goes to."""
