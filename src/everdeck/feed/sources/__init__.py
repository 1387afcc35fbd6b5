"""Where things come from. Each source stands alone and knows nothing of inboxes."""
