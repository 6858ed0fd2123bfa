"""Exchanges between ranks beside the computation that needs them."""
