"""Native kernels: compiled from csrc/, run or raise, never fall back."""
