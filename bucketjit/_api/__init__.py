"""The bucketed function that users call, its ``with_...`` methods, the decorator, the commands.

A bucketed function holds the configuration and one engine, and passes calls to the engine. The
package may import every package except `metrics` and `integrations`.
"""
