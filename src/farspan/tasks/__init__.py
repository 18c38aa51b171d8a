"""Tasks to train and test an attention on: the cosFormer paper's evaluation, and associative recall."""

from farspan.tasks.kinds import TASKS, make_task
from farspan.tasks.settings import VARIANTS, TaskSettings, attention_of
from farspan.tasks.task import Material, Task

__all__ = ["TASKS", "VARIANTS", "Material", "Task", "TaskSettings", "attention_of", "make_task"]
