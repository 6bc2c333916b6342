"""How the demo model that ships with Quire is made: corpus, tokenizer, training and scoring."""
