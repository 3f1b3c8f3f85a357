"""(being written by C)"""
