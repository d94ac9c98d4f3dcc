"""Measurements that are no tests: public models, and what a step costs."""
