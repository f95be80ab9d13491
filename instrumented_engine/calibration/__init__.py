"""What a machine reaches: matrix products and streams, repeated over a budget of time, and the hardware profile that follows."""
