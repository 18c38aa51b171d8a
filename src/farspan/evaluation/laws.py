from farspan.evaluation.conditions import LOG as LOG  # alias until merged
from farspan.evaluation.conditions import NAMES as NAMES
from farspan.evaluation.conditions import scaling_name as scaling_name
from farspan.evaluation.conditions import scaling_of as law_of  # noqa: F401
