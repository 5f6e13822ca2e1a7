"""Watch: reads statistics of weights, activations, gradients and updates while a model trains."""
