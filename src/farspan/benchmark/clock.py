from farspan.bench.timing import captured as captured  # alias until merged
