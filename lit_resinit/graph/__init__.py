"""One forward as a graph of operations; knows no plan."""
