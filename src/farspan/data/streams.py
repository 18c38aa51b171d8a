from farspan.data.sources import opened as opened  # alias until merged
