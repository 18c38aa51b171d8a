"""Speed and memory against peers, in the same run. Nothing is reported when the results differ."""
