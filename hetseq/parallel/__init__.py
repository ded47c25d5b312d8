"""One rank's replica of the model, and how its gradient becomes the gradient of all ranks."""
