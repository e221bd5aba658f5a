"""Clusters that lose nodes under load: what clients saw is recorded, and checked afterwards."""
