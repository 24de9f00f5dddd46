"""Input: how batches reach a rank, whichever engine prepares them."""
