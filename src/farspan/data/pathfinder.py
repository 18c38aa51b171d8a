from farspan.data.synthetic import *  # noqa: F403 - alias until merged

LABELS = 2
