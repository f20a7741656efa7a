"""Models and training steps as users of JAX's libraries write them, bucketed."""
