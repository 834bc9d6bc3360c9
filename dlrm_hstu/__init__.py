"""DLRMv4: an HSTU generative recommender, trained on Yambda-format data."""
