"""Tasks to train and test an attention on: the cosFormer paper's evaluation, and associative recall."""

from farspan.tasks.task import TASKS, VARIANTS, Material, Task, TaskSettings, attention_of, make_task

__all__ = ["TASKS", "VARIANTS", "Material", "Task", "TaskSettings", "attention_of", "make_task"]
