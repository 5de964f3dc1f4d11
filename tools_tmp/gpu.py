import sys, time, traceback; sys.path[:0]=["src","tests"]
import torch, scatterbrain as sb
import cases
from cases import *
def grads(out, inputs, seed=9):
    probe = normal(*out.shape, seed=seed).to(out.dtype).to(out.device)
    return torch.autograd.grad((out * probe).sum(), inputs)
cases.grads = grads
t0=time.time(); bad=0; done=0
for pair in cases.COMMON:
    for causal in (False,True):
        if causal and not is_causal_ok(pair): continue
        for mask in (None, some_keys(2,43)):
            for dt in ((torch.float64,torch.float32) if mask is None else (torch.float64,)):
                try:
                    q,k,v=[t.cuda() for t in qkv(37 if not causal else 43,43,dtype=dt)]
                    run(pair,q,k,v,None if mask is None else mask.cuda(),causal,impl="torch"); done+=1
                except Exception as e:
                    bad+=1
                    if bad<12: print("BAD",pair,causal,mask is not None,dt,type(e).__name__,str(e)[:300]); 
print("cases",done,"bad",bad,time.time()-t0,flush=True)
q,k,v=[torch.randn(1,4,300,32,device="cuda") for _ in range(3)]
for nm,m in {"default":dict(budget=1/8),"default causal":dict(budget=1/8,is_causal=True),"smyrf":sb.presets.scatterbrain(64),"reformer":sb.presets.scatterbrain(64,sparse="reformer"),"window":sb.presets.scatterbrain(64,sparse="local"),"bigbird":sb.presets.bigbird(64),"routing":sb.presets.routing_transformer(64,length=300),"nystrom":sb.presets.nystromformer(64),"linformer":sb.presets.linformer(64)}.items():
    torch._dynamo.reset()
    try:
        f=torch.compile(lambda a,b,c: sb.attention(a,b,c,**m),fullgraph=True); print(nm,"compile ok",(f(q,k,v)-sb.attention(q,k,v,**m)).abs().max().item(),flush=True)
    except Exception as e:
        print(nm,"compile FAIL", type(e).__name__); s=traceback.format_exc(); print(s[-1800:] if nm.startswith("default") else s[-300:],flush=True)
