"""Held plans: kept, re-bound or rebuilt, and never run over another request's context.

The plans themselves import what they need when they are made: `OrtPlan` onnxruntime, `CudaGraphPlan` CuPy, `TorchPlan`
PyTorch.
"""

from __future__ import annotations

from lkv.errors import RebindRefused
from lkv.ids import AllocId
from lkv.plan.callable import Buffers, CallablePlan
from lkv.plan.context import InferenceContext
from lkv.plan.cuda_graph import CudaGraphPlan
from lkv.plan.ort import OrtPlan, cache_input
from lkv.plan.protocol import Plan
from lkv.plan.refresh import RefreshCounters, refresh_session
from lkv.plan.session import DecodeSession
from lkv.plan.shape_key import ModelInstanceId, shape_key
from lkv.plan.source import KvRebindSource
from lkv.plan.torch import TorchPlan
from lkv.plan.validity import PlanValidity, RebindRefusal

__all__ = [
    "AllocId",
    "Buffers",
    "CallablePlan",
    "CudaGraphPlan",
    "DecodeSession",
    "InferenceContext",
    "KvRebindSource",
    "ModelInstanceId",
    "OrtPlan",
    "Plan",
    "PlanValidity",
    "RebindRefusal",
    "RebindRefused",
    "RefreshCounters",
    "TorchPlan",
    "cache_input",
    "refresh_session",
    "shape_key",
]
