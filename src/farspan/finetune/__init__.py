"""Fine-tuning: recipes of stages, their objectives, and the training room that runs them."""
