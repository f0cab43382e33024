"""moerl: RL post-training of mixture-of-experts language models with routing and sampling masks kept."""
