"""Files behind fsspec: code bundles and the logs of ranks."""
