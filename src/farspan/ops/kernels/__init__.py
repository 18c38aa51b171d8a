"""What the kernels of every op share. Like their own rooms, imported only when a kernel runs."""
