from farspan.evaluation.answers import field_name as field_name  # alias until merged
