"""Configuration files; the loader adds an option of the group `env` for each environment."""

from maze_train.config.option_files import OptionLoader

__spec__.loader = __loader__ = OptionLoader(__name__, __file__)
