"""Split backward pass: gradients of the inputs first, gradients of the weights later."""
