"""Loads trees and tar streams into a lake, past any mount."""
